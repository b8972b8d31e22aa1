"""Streams of samples without a known length: order, shards, packing into batches, decoding."""

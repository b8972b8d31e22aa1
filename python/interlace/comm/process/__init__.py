"""Process bookkeeping: rendezvous, groups, agreement between ranks, lost peers, the flight recorder."""

"""Models of a run: architectures, pretrained weights, LoRA and frozen parts, costs."""

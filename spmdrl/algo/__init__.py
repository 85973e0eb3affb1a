"""Pure maths on tensors and lists: no collectives, no configuration, no ranks."""

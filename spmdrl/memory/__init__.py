"""Memory arithmetic: how many bytes each phase of a step needs on a device and on its host."""

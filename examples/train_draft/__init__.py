"""Training of an EAGLE-3 head from a model's own answers."""

"""Updates: objectives, optimizers, and limits on them."""

"""What an update is: objectives, optimizers, and the limits that they keep."""

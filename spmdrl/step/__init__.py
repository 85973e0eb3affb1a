"""The data of a step, in the order in which it is made: batch, log-probabilities, advantages."""

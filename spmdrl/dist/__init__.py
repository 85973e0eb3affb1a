"""The home of collectives: process group, meshes, reductions, the exchange of rollouts."""

"""Communication between ranks: process group, meshes, named collectives, the exchange of sequences."""

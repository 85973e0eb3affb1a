"""The policy as a module: loading, sharding, packed attention, log-probabilities.

policy, trunk                   a micro-batch in, log-probabilities out
attention, kernels              which token sees which, by which kernel; context.py and tree_attention.py too
logprobs, logits_tile           log-probabilities of hidden states; divergence.py: with a teacher's
load, sharding, split           a model on the ranks of the mesh; weight_files.py: its files
layers, operators               what replaces transformers' layers: fused.py, recurrent.py, exact/
lora, frozen, offload           adapters; models that are not trained; the trainer asleep
"""

from spmdrl.model.machine import make_products_reproducible, place_torchs_cache

place_torchs_cache()  # before anything here imports transformers, which imports torch's compiler
make_products_reproducible()  # before the first product

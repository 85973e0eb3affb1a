"""Claims about GPUs, and the tests of tests/gpu and the steps of the proof that show each of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Claim:
    """A sentence and all of its evidence. A claim without evidence is one that nothing tests on a GPU yet."""

    what: str
    tests: tuple[str, ...] = ()  # "memory::test_x" is in tests/gpu/test_memory.py; "[case]" after it is one case of it
    steps: tuple[str, ...] = ()  # names of steps of stages.py


CLAIMS: Mapping[str, tuple[Claim, ...]] = {
    "Training on one device": (
        Claim(
            "Policy losses and their gradients are those of the host.",
            tests=("policy_losses::test_equal_to_the_host",),
        ),
        Claim(
            "Corrections of the mismatch, and what is measured of it, are those of the host.",
            tests=("correction::test_a_correction_on_a_device_is_that_on_the_host",),
        ),
        Claim(
            "Random numbers are those of the CPU, and tokens can be drawn deterministically.",
            tests=(
                "one_device::test_random_numbers_are_those_of_the_cpu",
                "one_device::test_tokens_can_be_drawn_deterministically",
            ),
        ),
        Claim(
            "In float32, bfloat16 and float16 the first update has ratios of exactly 1 and a divergence from "
            "the reference of exactly 0.",
            tests=("one_device::test_the_first_update_is_exactly_on_policy",),
        ),
        Claim(
            "An update in bfloat16, or in float16 with loss scaling, stays near one in float32.",
            tests=("one_device::test_half_precision_stays_near_full_precision",),
        ),
        Claim(
            "A critic learns next to the policy (PPO).",
            tests=("one_device::test_a_critic_learns_in_float32_beside_layers_in_bfloat16",),
        ),
        Claim(
            "A run with the embedded torch engine learns, and takes no more memory from step to step.",
            tests=("one_device::test_a_short_run_learns_and_leaves_the_memory_it_took",),
        ),
        Claim(
            "Fine-tuning by `spmdrl.sft` learns.",
            tests=("runs::test_fine_tuning_learns",),
        ),
        Claim(
            "A run that stopped and was resumed exports the weights, and has the metrics, of one that never stopped.",
            tests=("runs::test_a_run_that_stopped_is_bitwise_the_run_that_did_not",),
        ),
    ),
    "Attention and models": (
        Claim(
            "`varlen_attn` and SDPA give the outputs and gradients of the CPU: grouped heads, windows, sinks, "
            "earlier keys.",
            tests=(
                "attention::test_forward_and_backward_equal_the_cpu",
                "one_device::test_the_varlen_kernel_equals_sdpa",
            ),
        ),
        Claim(
            "Packed log-probabilities of Qwen3, Llama, Gemma 3, Qwen3-MoE, gpt-oss, Qwen3-Next and Qwen3.5 "
            "equal those of transformers on the CPU.",
            tests=("attention::test_packed_logprobs_equal_those_of_transformers_on_the_cpu",),
        ),
        Claim(
            "Gated delta nets on packed sequences equal the CPU, by plain products.",
            tests=("gated_delta::test_plain_products_equal_the_cpu",),
        ),
        Claim(
            "Gated delta nets on packed sequences equal the CPU, by the kernels of flash-linear-attention and "
            "causal-conv1d.",
            tests=("gated_delta::test_the_packages_kernels_equal_the_cpu",),
        ),
        Claim(
            "Fused norms, rotary embeddings and SwiGLU equal plain functions, and are no further from the truth than "
            "transformers' operations.",
            tests=(
                "fused::test_kernels_equal_plain_functions",
                "fused::test_half_precision_is_no_further_from_the_truth_than_transformers",
                "fused::test_a_weights_gradient_is_the_same_each_time",
            ),
        ),
        Claim(
            "flash-attn 2 and 3 give the outputs and gradients of the CPU.",
            tests=("attention::test_flash_attn_equals_the_cpu",),
        ),
        Claim(
            "The head's tiles in Triton equal torch's and are no further from float64; a forward pass waits for "
            "nothing; the head's memory is as predicted.",
            tests=(
                "head::test_a_tile_by_triton_is_the_tile_by_torch",
                "head::test_the_whole_head_is_no_further_from_float64_than_with_torchs_tiles",
                "head::test_a_forward_pass_never_waits_for_the_device",
                "head::test_the_memory_is_what_is_predicted",
            ),
        ),
    ),
    "Memory": (
        Claim(
            "Gradient checkpointing, full and selective, and host offload do not change an update.",
            tests=(
                "one_device::test_memory_levers_do_not_change_the_update",
                "one_device::test_offloaded_shards_live_on_the_host",
            ),
        ),
        Claim(
            "A sleeping trainer gives its memory back, and wakes bit for bit as it was.",
            tests=(
                "memory::test_a_sleeping_trainer_gives_its_memory_back",
                "memory::test_training_with_sleep_is_bitwise_training_without",
            ),
        ),
        Claim(
            "The optimizer's state on the host gives the bits of that on the device.",
            tests=("memory_plan::test_state_on_the_host_is_bitwise_state_on_the_device",),
        ),
        Claim(
            "Memory is checked when the device changes hands; random states are kept apart.",
            tests=(
                "memory::test_the_handover_catches_a_leak",
                "memory::test_random_states_of_the_device_are_kept_apart",
            ),
        ),
        Claim(
            "Predicted memory is near what torch allocates: activations, an update, the peak of a phase.",
            tests=(
                "memory_plan::test_what_is_kept_is_what_the_formula_says",
                "memory_plan::test_an_update_takes_what_the_plan_says",
                "memory_plan::test_the_peak_of_a_phase_is_its_own",
            ),
        ),
    ),
    "Weights reach the engine": (
        Claim(
            "The embedded torch engine holds the trainer's weights after a refit in buckets, and agrees with it.",
            tests=(
                "one_device::test_engine_and_trainer_agree_after_a_refit",
                "memory::test_a_refit_from_the_host_gives_the_engine_the_trainers_weights",
            ),
        ),
        Claim(
            "Through CUDA IPC another process holds the weights bit for bit; buckets are complete when they "
            "are read; a flipped bit is noticed; 50 refits leave nothing behind.",
            tests=(
                "refit_processes::test_the_check_answers",
                "refit_processes::test_another_process_holds_the_weights_bit_for_bit[cuda_ipc]",
                "refit_processes::test_a_bucket_is_not_read_before_it_is_complete",
                "refit_processes::test_a_flipped_bit_is_noticed",
                "refit_processes::test_digests_on_the_device_are_the_hosts",
                "refit_processes::test_refits_take_no_more_device_memory[cuda_ipc]",
            ),
        ),
        Claim(
            "Through pinned shared memory another process holds the weights bit for bit; 50 refits leave "
            "nothing behind.",
            tests=(
                "refit_processes::test_another_process_holds_the_weights_bit_for_bit[shared_memory]",
                "refit_processes::test_refits_take_no_more_device_memory[shared_memory]",
            ),
        ),
    ),
    "SGLang on one device": (
        Claim(
            "SGLang starts, and holds the trainer's weights by digest after a refit.",
            steps=("refit-0.6b",),
        ),
        Claim(
            "Its sleep gives the memory back, its wake takes it again, and it answers as before.",
            tests=("sglang::test_sleep_gives_the_memory_back_and_wake_takes_it",),
        ),
        Claim(
            "After a wake, batches that are padded to a CUDA graph read no garbage.",
            tests=("sglang::test_batches_that_are_padded_to_a_graph_read_no_garbage_after_a_wake",),
        ),
        Claim(
            "A run shares the device with SGLang, and learns.",
            tests=("sglang::test_a_short_run_shares_the_device_and_learns",),
        ),
        Claim(
            "With `true_on_policy = true`, products, means, log-softmax and attention over a pack have the "
            "bits of each sequence alone.",
            tests=(
                "true_on_policy::test_products_means_and_log_softmax_do_not_depend_on_other_rows",
                "true_on_policy::test_attention_over_a_pack_has_the_bits_of_each_sequence_alone",
                "true_on_policy::test_fa3_gives_a_query_the_same_bits_alone_and_among_others",
            ),
        ),
        Claim(
            'With `true_on_policy = true` and `"triton"`, the mismatch of a run is exactly 0.0.',
            tests=("true_on_policy::test_sglang_and_the_trainer_agree_exactly[triton]",),
        ),
        Claim(
            'With `true_on_policy = true` and `"fa3"`, the mismatch of a run is exactly 0.0.',
            tests=("true_on_policy::test_sglang_and_the_trainer_agree_exactly[fa3]",),
        ),
        Claim(
            "With `true_on_policy = true`, the embedded engine is refused by name on a CUDA device.",
            tests=("true_on_policy::test_the_embedded_engine_is_refused_by_name",),
        ),
    ),
    "Several devices": (
        Claim(
            "Two devices compute the gradients of one (FSDP over NCCL).",
            tests=("many_devices::test_two_devices_give_the_gradients_of_one",),
        ),
        Claim(
            "Refits on two devices: engine weights equal trainer weights, and each rank's buckets are opened "
            "on its own device.",
            tests=(
                "many_devices::test_engine_weights_equal_trainer_weights",
                "many_devices::test_each_ranks_buckets_are_opened_on_its_own_device",
            ),
        ),
        Claim(
            "One SGLang engine on two devices holds the trainer's weights.",
            tests=("sglang::test_one_engine_on_two_devices_holds_the_trainers_weights",),
        ),
        Claim(
            "One device trains while another samples (disaggregated).",
            tests=("sglang::test_one_device_trains_while_the_other_samples",),
        ),
        Claim(
            "Context parallelism: two devices attend as one, with every kernel.",
            tests=(
                "context::test_two_devices_attend_as_one",
                "context::test_tokens_are_gathered_between_devices",
            ),
        ),
        Claim(
            "Context, tensor and expert parallelism on two devices, and replicas of shards on four, give what one "
            "device gives.",
            tests=(
                "many_devices::test_layouts_of_two_devices_give_what_one_gives",
                "many_devices::test_replicas_of_shards_give_what_one_device_gives",
            ),
        ),
    ),
    "Speed": (
        Claim(
            "A run of a 0.6B-shaped model with SGLang: seconds of each phase; predicted and measured memory.",
            steps=("run-0.6b",),
        ),
        Claim(
            "The refit of 4B into SGLang beside a copy on the device.",
            steps=("refit-4b",),
        ),
        Claim(
            "Tokens per second, MFU and peak memory of the trainer's step.",
            steps=("step",),
        ),
    ),
    "Adapters": (
        Claim("Adapters on a frozen base in bfloat16 learn; the embedded engine samples with them after each refit."),
        Claim(
            "SGLang computes adapters of several versions in one batch (`csgmv`; `triton` with experts), takes them "
            "as CUDA tensors, and keeps the base while it sleeps."
        ),
        Claim("A base in 4 or 8 bits computes on CUDA what it computes on a CPU, in less memory, as the planner says."),
        Claim("8B on one GPU of 80 GB and 32B on eight train with adapters within the memory that the planner says."),
    ),
    "Images": (
        Claim("SGLang samples answers to prompts with images, which it reads as the trainer does."),
        Claim(
            "A vision model trains on a GPU, its tower frozen or not, within the memory that the planner says "
            "(`configs/qwen3-vl-4b-geo3k-1node.toml`)."
        ),
    ),
    "Whole machines": (
        Claim(
            "The shipped configurations that train whole models run on the machines that they name, within the "
            "memory that the planner says."
        ),
        Claim("Ranks on several nodes train together, started by torchrun, SLURM or Kubernetes."),
        Claim("The image of `launch/Dockerfile` can be built, and trains."),
        Claim("SGLang samples from models with gated delta nets, and takes their weights in a refit."),
    ),
}

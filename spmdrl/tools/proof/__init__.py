"""The parts of `spmdrl.tools.gpu_proof`, which runs a proof, and of `spmdrl.tools.gpu_report`, which tells of it."""

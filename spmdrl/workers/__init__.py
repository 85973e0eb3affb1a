"""Processes of a rank's that run code it does not trust.

Environments and rewards run in `pool.WorkerPool`: sandboxed, killable, with one socket to the rank. Agents and the
environments of verifiers are commands of the user's, killable and without a sandbox: `process.GuardedProcess`.

`channel` and `sandbox` are imported inside those processes, which start without torch; `process` and `folders` only on
the rank.
"""

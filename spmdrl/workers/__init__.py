"""Processes of a rank's that run code it does not trust: sandboxed, killable, with one socket to the rank.

`channel` and `sandbox` are imported inside those processes, which start without torch; `process` and `folders` only on
the rank.
"""

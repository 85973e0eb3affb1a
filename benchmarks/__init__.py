"""Programs that measure spmdrl; each says at its top how to run it."""

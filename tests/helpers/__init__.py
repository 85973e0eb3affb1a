"""Everything that more than one test module uses. No test module imports another."""

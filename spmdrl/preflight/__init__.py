"""May it start? Everything that is checked, and foretold, before the first process group."""

"""May it start? All checks and predictions before the first process group."""

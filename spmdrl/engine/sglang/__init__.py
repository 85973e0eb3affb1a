"""The SGLang engine; nothing outside this folder imports SGLang to sample."""

"""Steps that are kept, and computed again."""

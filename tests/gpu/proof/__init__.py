"""The proof on a GPU: stages of steps, claims, and the page that says what was seen of each."""

"""From prompts to batches of anchored masked blocks."""

"""The drafter: its configuration, rotary positions, attention and layers."""

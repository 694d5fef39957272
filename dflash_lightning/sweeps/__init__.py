"""A space in YAML -> an Optuna study whose trials are command lines."""

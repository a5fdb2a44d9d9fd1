"""One script per question; each writes what it measured into results/."""

"""Tests on real engines. `make test-engines ENGINE=…` runs them in that engine's own environment, against our wheel."""

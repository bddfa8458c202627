"""What an adapter is worth: step-size law, rank spectrum, gains, fidelity of a merge."""

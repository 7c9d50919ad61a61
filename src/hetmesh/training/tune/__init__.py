"""Which layout is fastest on the ranks at hand: some run, the machine's constants are fitted, the rest is predicted."""

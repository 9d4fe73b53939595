"""Cases: what is drawn, as plain records whose repr is a literal. Hypothesis strategies describe valid values, and shrink to small ones."""

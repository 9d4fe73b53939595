"""How fast: each operation of the contract, the reference beside gpu_impl and its peers. Nothing is timed before it is judged correct."""

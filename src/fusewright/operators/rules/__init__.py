"""Shape rules by family. Each module has a table RULES: OpOverload -> rule(*args, **kwargs), called as the operator
would be, with a TensorType for each tensor; a rule gives the result's TensorType (or a tuple), or NotImplemented when
it cannot tell (PyTorch's meta kernel then decides, or raises the user's error)."""

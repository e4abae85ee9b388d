"""Analytics Zoo's `zoo.common`; `nncontext` is `kindler.compat.zoo` itself."""

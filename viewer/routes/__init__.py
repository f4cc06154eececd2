"""One file per kind of page: read the store, build the model, render it."""

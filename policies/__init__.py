"""Controllers of K. Importing this package registers all of them."""

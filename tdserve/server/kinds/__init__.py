"""What differs between the kinds of stores when one is created, opened, described and repaired: a class for each."""

"""The client: what a user's process does. One session per client object, opened when first needed, reopened when
lost."""

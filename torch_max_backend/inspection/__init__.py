"""Accounts for users: what runs where and why, what memory a step takes, which operators there are."""

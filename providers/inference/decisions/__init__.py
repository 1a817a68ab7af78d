"""Decisions by chat models: the distribution over label tokens at the one position where the answer begins."""

"""What the model sees: history, input items, files, sealed content, compaction and truncation."""

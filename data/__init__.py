"""Text, tokens and files. A corpus goes through sources, tokenizer, prepare, corpus and batches, in this order."""

def has_letter(completions, solution, **kwargs):
    """
    Return 1 if a completion contains one of the letters of its row, 0 if not, and `None` (no reward) if the row has
    none.
    """
    texts = [each if isinstance(each, str) else each[-1]["content"] for each in completions]
    return [
        None if row is None else float(any(map(text.count, row))) for text, row in zip(texts, solution, strict=True)
    ]

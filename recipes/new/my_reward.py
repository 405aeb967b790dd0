def has_letter(completions, solution, **kwargs):
    """1 where one of the row's letters stands in the completion, else 0; `None`, no reward, for a row without any."""
    texts = [each if isinstance(each, str) else each[-1]["content"] for each in completions]
    return [
        None if row is None else float(any(map(text.count, row))) for text, row in zip(texts, solution, strict=True)
    ]

def has_letter(completions, solution, **kwargs):
    """1 if the completion contains one of the row's letters, otherwise 0. A row without letters is not scored."""
    texts = [each if isinstance(each, str) else each[-1]["content"] for each in completions]
    return [
        None if row is None else float(any(map(text.count, row))) for text, row in zip(texts, solution, strict=True)
    ]

def has_letter(completions, letter, **kwargs):
    """1 where the letter of the row stands in the completion, else 0; `None`, no reward, for a row without one."""
    texts = [each if isinstance(each, str) else each[-1]["content"] for each in completions]
    return [None if one is None else float(one in text) for text, one in zip(texts, letter, strict=True)]

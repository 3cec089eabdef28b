"""Words and questions for prompts."""

from __future__ import annotations

import random

WORDS = tuple(
    """
    about above across after again against air all almost alone along already also always among animal
    answer any area around ask away back bad base because become before began behind being below best better
    between big bird black blue board boat body book both box boy bring brother brown build busy but call
    came can car care carry case cause center change check child city class clear close cold color come
    common complete correct could country course cover cross cry cut dark day decide deep did direct
    distance do dog done door down draw drive dry during each early earth east easy eat end enough even
    every example eye face fact fall family far farm fast father feel feet few field figure final find fine
    fire first fish five fly follow food foot for force form found four free friend from front full game
    gave girl give go gold good great green ground group grow half hand happen hard has have head hear heat
    help here high hold home horse hot hour house how hundred idea if inch interest is island it just keep
    kind king know land language large last late laugh lay lead learn leave left less let letter life light
    like line list listen little live long look lot love low machine made main make man many map mark may
    mean measure men might mile mind minute money moon more morning most mother mountain move much music
    must name near need never new next night north note nothing notice noun now number object of off often
    old on once one only open order other our out over own page paper part pass pattern people perhaps
    person picture piece place plain plan plane plant play point port pose possible power present press
    problem produce product pull put question quick rain ran reach read
    """.split()  # noqa: SIM905 (a list literal would take a line for every word)
)

QUESTIONS = (
    "Write a function that reads a file and returns its lines.",
    "Show me a class for a simple queue.",
    "How do I parse a date from a string?",
    "Write a function that counts the words of a text.",
    "How can I sort a list of tuples by their second item?",
    "Write a context manager that measures time.",
    "Explain what this function does.",
    "Add a docstring, please.",
    "What happens if the list is empty?",
    "Write a test for it.",
    "Can you make it raise a ValueError on bad input?",
    "Show me how to open a socket and send a line.",
    "Write a generator that yields the Fibonacci numbers.",
    "How do I join two paths?",
    "Write a function that copies a directory tree.",
    "Rewrite it with a list comprehension.",
)


def words(source: random.Random, count: int) -> str:
    """About `count` tokens for most tokenizers; exact lengths need token prompts."""
    return " ".join(source.choices(WORDS, k=count))

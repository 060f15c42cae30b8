"""Calculators in chapters: controls, and a table of results.

A chapter has one at its line `<!-- calculator: NAME -->`. The page has the table for the values
that the controls begin with; a script, calculator-NAME.js, computes it for others, by the same
formulas.

    calculator      what a calculator is
    formulas        those that chapters have
    pages           their places in pages
    calculators.js  in the browser: what all of them have in common
"""

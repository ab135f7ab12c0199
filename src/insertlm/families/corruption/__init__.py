"""What is deleted of a text to make a training state: one way in each file, and the packing that all of them share.

    base           the interface: how many tokens are deleted, which ones, and which of these the model is asked for
    uniform        the paper's: n of L, every subset equally likely
    stretch        within one stretch of the text, as infilling has it
    groups         of groups, each a frame that is written first and an end that has to be deduced
    solver         the order of deletion that leaves what a solver of the task has found so far
    choice         which of these the keys of a recipe mean
    blanks         where the gaps of a text are: of whole words, clauses or sentences; or its end, or all of it
    partly_filled  such gaps, of each of which some tokens are missing
    leftmost       any of these, with the leftmost missing token of a slot alone asked for
    packed         a corrupted batch: deleted, closed up and packed
    laid_out       a batch with blanks, their tokens behind the text
    slots          the slots of such a batch, and what is missing in each

May import families.base and what families may import. Models choose a corruption; none here knows a model.
"""

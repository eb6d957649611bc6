"""The baseline that looks at no order: a linear model of how often each symbol occurs."""

import numpy as np

from regard.core import require

from .tokens import Split


def bag_of_symbols(train: Split, test: Split, length: int, vocabulary: int) -> float:
    """Top-1 accuracy in percent of a logistic regression on the counts of symbols among the first `length`.

    A model of sequences learns something from their order only if it is better. Counts have mean 0 and deviation 1 in
    the training split (scikit-learn, C = 1, at most 1,000 iterations).
    """
    require("sklearn")

    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    if len(np.unique(train.labels)) < 2:
        return 100 * float((test.labels == train.labels[0]).mean())
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    model.fit(train.counts(length, vocabulary), train.labels)
    return 100 * float(model.score(test.counts(length, vocabulary), test.labels))

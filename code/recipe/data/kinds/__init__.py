"""What some tasks read that is neither labelled texts nor documents: pictures, pairs, questions."""

/* Sphinx finds pages with all words of a query, so a pasted error, with a user's names and values, is on none. Titles
   and index entries that share most of their words with the query come first; rare words count more. */
document.addEventListener("DOMContentLoaded", () => {
  if (typeof Search === "undefined") return;
  const usual = Search._performSearch;
  const stemmer = new Stemmer();
  const wordsOf = (text) => new Set(splitQuery(text.toLowerCase())
    .filter((word) => !stopwords.has(word) && !/^\d+$/.test(word)).map((word) => stemmer.stemWord(word)));
  const patternOf = (text) => new RegExp(text.split("…").map((part) => part.replace(/[^\w\s]/g, "\\$&")).join(".*"), "i");

  Search._performSearch = (query, terms, ...others) => {
    const { alltitles, indexentries, docnames, filenames, titles } = Search._index;
    const entries = Object.entries({ ...alltitles, ...indexentries }).map(([text, at]) => [text, at, wordsOf(text)]);
    const counts = new Map();
    for (const [, , words] of entries) for (const word of words) counts.set(word, (counts.get(word) || 0) + 1);
    const weight = (words) => [...words].reduce((sum, word) => sum + Math.log(1 + entries.length / (counts.get(word) || 1)), 0);
    const ofQuery = weight(terms);
    const found = [];
    for (const [text, at, words] of entries) {
      const both = [...words].filter((word) => terms.has(word));
      const shared = weight(both);
      const share = Math.max(shared / weight(words), shared / ofQuery);
      if (both.length < 2 || both.length < Math.min(3, terms.size) || share < 0.5) continue;
      const score = shared * share * (patternOf(text).test(query) ? 2 : 1);
      for (const [file, id] of at)
        found.push([docnames[file], `${titles[file]}: ${text}`, id ? `#${id}` : "", null, score, filenames[file], "title"]);
    }
    found.sort((one, other) => one[4] - other[4]);
    const shown = found.slice(-8);
    const isShown = (page) => shown.some((one) => one[0] === page[0] && one[2] === page[2]);
    return [...usual(query, terms, ...others).filter((page) => !isShown(page)), ...shown]; // the last is the first
  };
});

// A page whose title is what was searched comes before the objects and texts that contain it.
var Scorer = {
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 5, 1: 2, 2: -5 },
  objPrioDefault: 0,
  title: 60,
  partialTitle: 20,
  term: 5,
  partialTerm: 2,
};

// The views of spectra, and which model, matrix and comparison an address names.

scripts.start = () => {
  Object.setPrototypeOf(index.meanings, null); // a stranger's column may be called like a method
  index.models.forEach((m, number) => { m.number = number; });
};
scripts.models = () => modelsView();
scripts.lineage = () => lineageView();
scripts.outliers = () => outliersView();
scripts.failures = () => failuresView();
scripts.model = (words) => { const place = numbers(words); return place ? modelView(...place) : modelsView(); };

function numbers([number, second, third, fourth]) {
  const against = second === "vs" ? Number(third) : null;
  const layer = second === "vs" ? fourth : second;
  const about = index.models[Number(number)];
  if (!about || (against !== null && !index.models[against])) return null;
  const most = index.layouts[about.layout].names.length;
  return [about.number, /^\d+$/.test(layer) && Number(layer) < most ? Number(layer) : null, against];
}

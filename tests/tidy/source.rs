//! Finds which file of `src` uses which other one: the module tree, and every path in it, followed to the file that defines what it names.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use syn::{
    Item, UseTree,
    visit::{self, Visit},
};

/// A path of modules from the root of the crate.
type ModulePath = Vec<String>;

/// One module, which is one file.
struct Module {
    file: PathBuf,
    syntax: syn::File,
    children: BTreeSet<String>,
    /// Names that are brought into this module by `use`, and what they stand for.
    names: BTreeMap<String, Vec<String>>,
}

/// The modules of a crate.
pub struct Crate {
    modules: BTreeMap<ModulePath, Module>,
}

impl Crate {
    /// Parses the crate whose modules are in `folder`, and whose root is the file `root` there.
    pub fn parse(folder: &Path, root: &str) -> Self {
        let mut found = Self { modules: BTreeMap::new() };
        found.add(Vec::new(), folder.join(root), folder);
        found
    }

    fn add(&mut self, path: ModulePath, file: PathBuf, folder: &Path) {
        let text = fs::read_to_string(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        let syntax = syn::parse_file(&text).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        let mut children = BTreeSet::new();
        for item in &syntax.items {
            let Item::Mod(module) = item else { continue };
            if module.content.is_some() {
                continue;
            }
            let name = module.ident.to_string();
            let (flat, nested) = (folder.join(format!("{name}.rs")), folder.join(&name).join("mod.rs"));
            let child = path.iter().cloned().chain([name.clone()]).collect();
            self.add(child, if flat.exists() { flat } else { nested }, &folder.join(&name));
            children.insert(name);
        }
        self.modules.insert(path, Module { file, syntax, children, names: BTreeMap::new() });
    }

    /// Returns the pairs of files where the first uses something that the second defines.
    ///
    /// A declaration of a module is not a use, and neither is a re-export; what is used through a re-export belongs to the file that
    /// defines it.
    pub fn uses(mut self) -> BTreeSet<(PathBuf, PathBuf)> {
        let mut names = BTreeMap::new();
        for (path, module) in &self.modules {
            names.insert(path.clone(), self.names_of(path, module));
        }
        for (path, names) in names {
            self.modules.get_mut(&path).expect("it was just read").names = names;
        }
        let mut found = BTreeSet::new();
        for (path, module) in &self.modules {
            let mut paths = Paths::default();
            paths.visit_file(&module.syntax);
            for named in paths.found {
                let Some(rooted) = self.rooted(path, &named) else { continue };
                if let Some(file) = self.defined_in(&rooted, 0)
                    && file != module.file
                {
                    found.insert((module.file.clone(), file));
                }
            }
        }
        found
    }

    fn names_of(&self, path: &ModulePath, module: &Module) -> BTreeMap<String, Vec<String>> {
        let mut names = BTreeMap::new();
        for item in &module.syntax.items {
            let Item::Use(item) = item else { continue };
            for (name, target) in flatten(&item.tree) {
                if let Some(target) = self.rooted(path, &target) {
                    names.insert(name, target);
                }
            }
        }
        names
    }

    /// Returns `path`, as seen in the module `at`, from the root of the crate; `None` if it leads out of the crate.
    fn rooted(&self, at: &ModulePath, path: &[String]) -> Option<Vec<String>> {
        let mut base: Vec<String> = match path.first()?.as_str() {
            "crate" => Vec::new(),
            "self" => at.clone(),
            "super" => at[..at.len().checked_sub(1)?].to_vec(),
            child if self.modules.get(at)?.children.contains(child) => {
                at.iter().cloned().chain([child.to_owned()]).collect()
            }
            _ => return None,
        };
        for part in &path[1..] {
            if part == "super" {
                base.pop()?;
            } else if part != "self" {
                base.push(part.clone());
            }
        }
        Some(base)
    }

    /// Returns the file that defines what `path` names.
    fn defined_in(&self, path: &[String], depth: usize) -> Option<PathBuf> {
        let known = (0..=path.len()).rev().find(|end| self.modules.contains_key(&path[..*end]))?;
        let module = &self.modules[&path[..known]];
        match path.get(known).and_then(|name| module.names.get(name)) {
            Some(target) if depth < 8 => {
                let followed = [target.as_slice(), &path[known + 1..]].concat();
                self.defined_in(&followed, depth + 1)
            }
            _ => Some(module.file.clone()),
        }
    }
}

/// The paths that a file names, except for those of its tests and of its re-exports.
#[derive(Default)]
struct Paths {
    found: Vec<Vec<String>>,
}

fn is_of_tests(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("cfg")
            && attribute.parse_args::<syn::Ident>().is_ok_and(|condition| condition == "test")
    })
}

impl<'ast> Visit<'ast> for Paths {
    fn visit_item_mod(&mut self, module: &'ast syn::ItemMod) {
        if !is_of_tests(&module.attrs) {
            visit::visit_item_mod(self, module);
        }
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        if matches!(item.vis, syn::Visibility::Inherited) && !is_of_tests(&item.attrs) {
            self.found.extend(flatten(&item.tree).into_iter().map(|(_, path)| path));
        }
    }

    fn visit_visibility(&mut self, _: &'ast syn::Visibility) {
        // The visibility of an item is not a use of anything.
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        if path.segments.len() > 1 {
            self.found.push(path.segments.iter().map(|segment| segment.ident.to_string()).collect());
        }
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        // Arguments that are expressions, such as those of `format!` and `debug_assert!`.
        use syn::{Expr, Token, punctuated::Punctuated};
        let arguments = call.parse_body_with(Punctuated::<Expr, Token![,]>::parse_terminated);
        for argument in arguments.into_iter().flatten() {
            visit::visit_expr(self, Box::leak(Box::new(argument)));
        }
        visit::visit_macro(self, call);
    }
}

/// Returns the names that a `use` brings in, each with the path that it stands for.
fn flatten(tree: &UseTree) -> Vec<(String, Vec<String>)> {
    fn walk(tree: &UseTree, before: &[String], found: &mut Vec<(String, Vec<String>)>) {
        let with =
            |name: &syn::Ident| -> Vec<String> { before.iter().cloned().chain([name.to_string()]).collect() };
        match tree {
            UseTree::Path(path) => walk(&path.tree, &with(&path.ident), found),
            UseTree::Name(name) if name.ident == "self" => {
                found.push((before.last().cloned().unwrap_or_default(), before.to_vec()));
            }
            UseTree::Name(name) => found.push((name.ident.to_string(), with(&name.ident))),
            UseTree::Rename(rename) => found.push((rename.rename.to_string(), with(&rename.ident))),
            UseTree::Glob(_) => found.push(("*".to_owned(), before.to_vec())),
            UseTree::Group(group) => group.items.iter().for_each(|tree| walk(tree, before, found)),
        }
    }
    let mut found = Vec::new();
    walk(tree, &[], &mut found);
    found
}

/// Returns the groups of files that use each other in a circle, each in order.
pub fn circles(uses: &BTreeSet<(PathBuf, PathBuf)>) -> Vec<Vec<PathBuf>> {
    let mut next: BTreeMap<&PathBuf, Vec<&PathBuf>> = BTreeMap::new();
    for (from, to) in uses {
        next.entry(from).or_default().push(to);
    }
    let reached = |start: &PathBuf| -> BTreeSet<PathBuf> {
        let mut seen = BTreeSet::new();
        let mut waiting = vec![start];
        while let Some(file) = waiting.pop() {
            for to in next.get(file).into_iter().flatten() {
                if seen.insert((*to).clone()) {
                    waiting.push(to);
                }
            }
        }
        seen
    };
    let reach: BTreeMap<&PathBuf, BTreeSet<PathBuf>> =
        next.keys().map(|file| (*file, reached(file))).collect();
    let mut found = BTreeSet::new();
    for (file, seen) in &reach {
        if seen.contains(*file) {
            let circle =
                seen.iter().filter(|other| reach.get(other).is_some_and(|back| back.contains(*file)));
            found.insert(circle.cloned().collect::<Vec<_>>());
        }
    }
    found.into_iter().collect()
}

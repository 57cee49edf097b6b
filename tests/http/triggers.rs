//! `/_notibus/triggers` lists the state and the parked databases of triggers, retries them and forgets them.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use notibus::{
    EventKind,
    http::{ApiOptions, ServerOptions},
    jobs::{IndexBuild, TriggerOptions, index_trigger},
};

use crate::{
    client::{ask, get},
    common::{db, until},
    fixture::HttpFixture,
};

#[tokio::test]
async fn triggers_are_listed_and_managed() {
    let fixture =
        HttpFixture::with(ApiOptions::default(), ServerOptions::default(), |api, _, _| api.triggers()).await;
    let is_mended = Arc::new(AtomicBool::new(false));
    let mended = Arc::clone(&is_mended);
    let build = move |build: IndexBuild| {
        let is_bad = build.db.name.as_str() == "bad" && !mended.load(Ordering::SeqCst);
        async move { if is_bad { Err("no disk".into()) } else { Ok(()) } }
    };
    let (debounce, attempts_max) = (Duration::ZERO, 1);
    let options = TriggerOptions::index("views").debounce(debounce).attempts_max(attempts_max);
    let trigger = index_trigger(&fixture.dispatcher, options, build).await.unwrap();
    for name in ["good", "bad"] {
        fixture.event(&db(name, 1), EventKind::Created).await;
    }
    // The first round of retries may come right after it was parked, and park it again.
    assert!(trigger.wait_for(|status| status.done == 1 && status.parked >= 1).await);

    let list = get(fixture.at(), "/_notibus/triggers").await.json();
    let views = &list["triggers"][0];
    assert_eq!((&views["trigger"], &views["parked"]), (&"views".into(), &1.into()));
    let status = &views["status"];
    assert_eq!(status["stuck"], 0);
    assert!(status["parked"].as_u64() >= Some(1), "{status}");
    let shown = get(fixture.at(), "/_notibus/triggers/views").await.json();
    assert_eq!(shown["databases"][0]["db"], "bad");
    assert_eq!(shown["databases"][0]["error"], "no disk");
    let instance = shown["databases"][0]["instance"].as_str().unwrap();
    let page = get(fixture.at(), &format!("/_notibus/triggers/views?after=bad&instance={instance}")).await;
    assert_eq!(page.json()["databases"].as_array().unwrap().len(), 0);

    is_mended.store(true, Ordering::SeqCst);
    let retry = "/_notibus/triggers/views/retry";
    let asked = ask(fixture.at(), "POST", retry, "", r#"{"db":"bad"}"#).await;
    assert_eq!((asked.head.status, &asked.json()["databases"]), (202, &1.into()));
    until("the retry", async || trigger.status().done == 2).await;
    until("nothing to be parked", async || {
        get(fixture.at(), "/_notibus/triggers/views").await.json()["parked"] == 0
    })
    .await;

    for (method, target, headers, body, status) in [
        ("POST", "/_notibus/triggers", "", "", 405),
        ("GET", "/_notibus/triggers?odd=1", "", "", 400),
        ("GET", "/_notibus/triggers/none", "", "", 404),
        ("GET", "/_notibus/triggers/views?after=bad", "", "", 400),
        ("GET", "/_notibus/triggers/views?odd=1", "", "", 400),
        ("GET", retry, "", "", 405),
        ("POST", retry, "", r#"{"db":"bad"}"#, 404),
        ("POST", retry, "", r#"{"odd":1}"#, 400),
        ("POST", retry, "Origin: http://localhost\r\n", "", 403),
        ("POST", "/_notibus/triggers/none/retry", "", "", 404),
        ("GET", "/_notibus/triggers/views/reset", "", "", 405),
    ] {
        let answer = ask(fixture.at(), method, target, headers, body).await;
        assert_eq!(answer.head.status, status, "{method} {target} {body}: {}", answer.body);
    }
    let reset = ask(fixture.at(), "POST", "/_notibus/triggers/views/reset", "", "").await;
    assert_eq!(reset.head.status, 200, "{}", reset.body);
    assert_eq!(get(fixture.at(), "/_notibus/triggers/views").await.head.status, 404);
    fixture.event(&db("other", 1), EventKind::Created).await;
    assert!(trigger.wait_for(|status| status.is_finished).await, "one that runs has lost its cursor");
}

//! What happens in a running node when its cluster becomes unavailable: how its parts continue or end. `states` covers what the node
//! reports.

use std::{
    thread,
    time::{Duration, Instant},
};

use tokio::task::block_in_place;

use crate::{
    cluster::Cluster,
    stage::{ALL_COMMANDS, NO_ANSWER, Stage},
};

/// Regression: a node that was asked to stop during an outage of the cluster waited for the end of the outage, and further signals did not
/// make it stop sooner.
pub(crate) async fn everything_ends_without_the_cluster() {
    block_in_place(|| {
        let mut stage = Stage::start(Cluster::start());
        stage.cluster.kill_server(0);
        let _open = stage.begin_to_post();
        stage.until_ready("503", "\"cause\":\"away\"");
        stage.commands_say(&ALL_COMMANDS, 1, NO_ANSWER);

        let began = Instant::now();
        stage.served.ask_to_stop();
        let Stage { served, log, mut cluster, .. } = stage;
        assert_eq!(served.wait(), Some(1), "it did not end in order");
        assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
        assert!(log.text().contains("gave up "), "{}", log.text());

        cluster.restart_server(0);
        cluster.wait_until_available();
        let mut stage = Stage::start(cluster);
        stage.cluster.kill_server(0);
        let _open = stage.begin_to_post();
        stage.until_ready("503", "\"cause\":\"away\"");
        stage.served.ask_to_stop();
        thread::sleep(Duration::from_millis(500));
        let began = Instant::now();
        stage.served.ask_to_stop();
        assert_eq!(stage.served.wait(), Some(0));
        assert!(began.elapsed() < Duration::from_secs(4), "{:?}", began.elapsed());
    });
}
